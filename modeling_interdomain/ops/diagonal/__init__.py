"""What operators with a fixed diagonal recurrence share."""
