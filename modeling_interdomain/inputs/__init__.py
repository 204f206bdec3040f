"""What arrives at a forward: checks, and losses that go with it."""
