"""What belongs to a host rather than to a worker: the fork server, lifetimes, memory that stays."""
