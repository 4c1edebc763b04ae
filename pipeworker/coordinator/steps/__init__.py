"""What goes on from step to step, and lasts while generations come and go. Pure."""
