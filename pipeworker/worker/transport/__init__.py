"""Moves tensors between stages, point to point, over one channel a directed edge.

A :class:`~pipeworker.worker.transport.links.link.Link` moves raw tensors by the mechanism that its
two ends have in common; a channel moves whole values over it, nested as the user's layers pass
them.
"""
