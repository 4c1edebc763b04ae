"""Communication between processes: messages, frames, lines over pipes, keys and sockets."""
