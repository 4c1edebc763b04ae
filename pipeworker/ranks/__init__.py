"""Processes that pipeworker did not start: their ranks, their rendezvous, rank 0's coordinator.

Both a job under torchrun (``launcher.torchrun``) and a user's script (``pipeworker.session``) join
a job this way.
"""
