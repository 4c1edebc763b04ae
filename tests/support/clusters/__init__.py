"""Hosts and clusters on one machine."""
