"""Later."""


def export_attention(*arguments):
    raise NotImplementedError


def export_s4d(*arguments):
    raise NotImplementedError
