"""What one answer of a report says about one token, with alternatives or without."""

import math
from collections.abc import Mapping


def alternatives(answer: Mapping, position: int) -> dict[int, float] | None:
    """Log-probabilities in nats of the best tokens at a position, by token; None: the report has none.

    Speculation may leave out those of some positions or of all, and a report may be kept without any.
    """
    best = answer.get("top") or ()
    if position >= len(best) or not best[position]:
        return None
    return {token: math.nan if logprob is None else logprob for token, logprob in best[position]}


def log_probability(answer: Mapping, position: int) -> float | None:
    """Log-probability in nats of the token generated at a position; None: the report has none that is finite.

    Among the alternatives where there are some: a generated token that is not one of them has none.
    """
    token, best = answer["tokens"][position], alternatives(answer, position)
    if best is not None:
        found = best.get(token)
    else:
        logprobs = answer.get("logprobs") or ()
        found = logprobs[position] if position < len(logprobs) else None
    return found if found is not None and math.isfinite(found) else None
