"""The selective scan of Mamba."""
