"""What people start from: a script with a reward of its own, and the demo's model."""
