"""Prefix index: finds the blocks that already hold the beginning of a text. Bookkeeping only, standard library only.

A radix tree over full committed blocks (as RadixAttention's, Zheng et al. 2024, arXiv:2312.07104, section 3, with one
block to an edge), with one root per salt. Children are keyed by the block's tokens themselves, not by a hash of them:
two texts can never be taken for one another, whatever their authors contrive. Nothing is found under another salt than
it was indexed with.

Whoever refers to a node's block refers to those of all nodes above it. So an unreferenced node has only unreferenced
nodes below it, and since tables let go of their deepest block first, these were let go before it: evicting what was let
go first always meets a leaf.
"""

from collections.abc import Iterator, Sequence

Tokens = tuple[int, ...]


class Node:
    """A full block in its context: the tokens of its path from the root are what its positions attended to."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: "Node | None", key: Tokens, block: int) -> None:
        self.parent = parent  # None: a root, which has no block
        self.key = key
        self.block = block
        self.children: dict[Tokens, Node] = {}


class PrefixIndex:
    """Blocks of `block_size` tokens. A block is indexed at most once; a text's block is the first that was indexed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[int, Node] = {}  # by block
        self._roots: dict[str, Node] = {}  # by salt; only those with children
        self._salts: dict[Node, str] = {}  # of the roots

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> list[Node]:
        """The longest indexed path of full blocks that `tokens` begin with, at most `limit` of them."""
        path: list[Node] = []
        node = self._roots.get(salt)
        while node is not None and len(path) < limit:
            start = len(path) * self.block_size
            node = node.children.get(tuple(tokens[start : start + self.block_size]))
            if node is not None:
                path.append(node)
        return path

    def insert(self, parent: Node | None, salt: str, key: Tokens, block: int) -> Node:
        """The node of these tokens under `parent` (None: the salt's root): a new one for `block`, or the one that is
        there already, whose block is then another."""
        if parent is None:
            parent = self._root(salt)
        node = parent.children.get(key)
        if node is None:
            node = self.nodes[block] = parent.children[key] = Node(parent, key, block)
        return node

    def remove(self, block: int) -> list[int]:
        """Take a block and everything below it out; returns their blocks, deepest first. Costs O(1) each."""
        top = self.nodes[block]
        removed = [node.block for node in _below(top)]
        for each in removed:
            del self.nodes[each]
        parent = top.parent
        assert parent is not None, f"the root of block {block} is no node of a block"
        del parent.children[top.key]
        if not parent.children and parent in self._salts:
            del self._roots[self._salts.pop(parent)]
        return removed

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, (), -1)
            self._salts[root] = salt
        return root

    def audit(self, counts: Sequence[int]) -> None:
        """Raise AssertionError unless the tree and its table of blocks agree, no root is empty, and what is
        unreferenced (`counts` by block) has nothing referenced below it."""
        found = [node for root in self._roots.values() for node in _below(root) if node is not root]
        blocks = sorted(node.block for node in found)
        assert blocks == sorted(self.nodes), f"blocks in the tree {blocks}, in its table {sorted(self.nodes)}"
        assert all(self.nodes[node.block] is node for node in found), "the table has another node than the tree"
        assert all(root.children for root in self._roots.values()), "an empty root"
        assert {root: salt for salt, root in self._roots.items()} == self._salts, "roots and salts differ"
        for node in found:
            assert len(node.key) == self.block_size, f"block {node.block} has a key of {len(node.key)} tokens"
            for key, child in node.children.items():
                assert child.parent is node, f"block {child.block} does not know its parent {node.block}"
                assert child.key == key, f"block {child.block} is filed under other tokens than its own"
                assert counts[node.block] or not counts[child.block], (
                    f"block {child.block} is referenced, and its parent {node.block} is not"
                )


def _below(top: Node) -> Iterator[Node]:
    """`top` and what is below it, children before parents."""
    order, stack = [], [top]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    return reversed(order)
