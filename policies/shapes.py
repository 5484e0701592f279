"""The shape of a tree of drafts: the tuple of its nodes' parents. Standard library only.

Node v is the draft at index v of its sequence. Its parent is a node before it, or ROOT: the last committed token.
"""

ROOT = -1

Parents = tuple[int, ...]


def chain(length: int) -> Parents:
    """The tree in which the parent of node v is node v − 1."""
    return tuple(range(ROOT, length - 1))


def is_chain(parents: Parents) -> bool:
    return parents == chain(len(parents))
