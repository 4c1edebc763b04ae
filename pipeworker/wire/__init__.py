"""How processes talk on the control plane: messages, codec, keys and sockets."""
