"""What will run: partition, schedules and their proof. Pure: no clock, file, socket or torch."""
