"""What the workers of a run did and when: recorded meanwhile, read and explained afterwards."""
