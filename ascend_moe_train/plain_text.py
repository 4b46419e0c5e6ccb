"""Text of others' making, such as the name of a file, for where a terminal shows it. Pure."""


def plain(text: str) -> str:
    r"""The text with what cannot be printed, or would steer a terminal, as its escape, such as `\x1b` or `\udcff`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
