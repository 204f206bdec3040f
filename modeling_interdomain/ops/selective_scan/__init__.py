"""The selective scan; naive.py is the definition."""
