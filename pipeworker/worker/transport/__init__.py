"""Moves tensors between stages, point to point, one channel a directed edge.

A :class:`~pipeworker.worker.transport.links.link.Link` moves raw tensors, by what its two ends have
between them; a channel moves whole values, nested as the user's layers pass them.
"""
