"""What all families of operators share."""
