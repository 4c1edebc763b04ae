"""Moves tensors between stages, point to point, one channel a directed edge.

A :class:`~pipeworker.worker.transport.link.Link` moves raw tensors (in memory for tests,
torch.distributed for real); a channel moves whole values, nested as the user's layers pass them.
"""
