"""How processes talk: messages and frames, lines over pipes, keys and sockets."""
