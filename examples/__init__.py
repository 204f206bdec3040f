"""What a user copies: each file is a program or a handful of functions that stand on their own."""
