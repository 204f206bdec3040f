class GenerationTesterMixin:
    """Named by one test of ModelTesterMixin; its own tests are not in the source distribution."""
