"""One sentence for whatever is not as nsa-dcp was written against; raising it in the factory stops the server."""


def require(condition: bool, needed: str, found: object) -> None:
    """Raise unless a condition holds.

    Args:
        condition: what was checked.
        needed, found: what nsa-dcp needs, and what is there.

    Raises:
        RuntimeError: the condition does not hold.
    """
    if not condition:
        raise RuntimeError(f"nsa-dcp needs {needed}, found {found}; serve without --dcp-size, or report this")
