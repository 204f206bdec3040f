class ExportTesterMixin:
    """A base of ModelTesterMixin whose tests are not in the source distribution."""
