"""Do to a command what a refusal advises, word by word."""

from nsa_dcp.sglang_plugin.admission.reading.launch_parser import build_parser

_PARSER = build_parser()


def follow(words, change):
    """The words of a command line after a change. Later words win over earlier ones, as for sglang."""
    words = list(words)
    for flag in change.drop:
        words = _without(words, flag)
    for use in change.use:
        if use.startswith("-"):
            words += use.split(" ", 1)
        else:
            name = use.split("=")[0]
            words = [use, *(word for word in words if not word.startswith(f"{name}="))]
    return words


def _without(words, flag):
    if not flag.startswith("-"):
        return [word for word in words if not word.startswith(f"{flag}=")]
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            name = word.split("=")[0]
            dropping = _field(name) == _field(flag)
            if dropping:
                continue
        elif dropping:
            continue
        kept.append(word)
    return kept


def _field(name):
    """The field that a flag sets, by any of its spellings or abbreviations; the name where it is none."""
    spellings = _PARSER._option_string_actions
    if name in spellings:
        return spellings[name].dest
    fields = {action.dest for spelling, action in spellings.items() if spelling.startswith(name)}
    return fields.pop() if len(fields) == 1 else name
