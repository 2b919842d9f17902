"""What one fit needs around the loop."""
