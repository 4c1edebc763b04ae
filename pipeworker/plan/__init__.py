"""What will run: partition, placement, schedules, checks. Pure: no clock, file, socket, torch."""
