"""What is particular to generate(): many prompts at once, drafts, prompts read before."""
