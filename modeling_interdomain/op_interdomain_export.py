"""Later."""


def export_attention(*arguments):
    raise NotImplementedError
