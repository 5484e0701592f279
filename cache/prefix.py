"""Prefix index: finds the blocks that already hold the beginning of a text. Bookkeeping only, standard library only.

The index is a radix tree over full committed blocks (as in RadixAttention, Zheng et al. 2024, arXiv:2312.07104,
section 3, with one block per edge). Each salt has a root of its own, so a block is found only under the salt that it
was indexed with. Children are keyed by the block's tokens, not by a hash of them, so no client can construct two texts
that collide.

A table that refers to a node's block refers to the blocks of all nodes above it. So all nodes below an unreferenced
node are unreferenced too. Tables drop their last block first, so the nodes below were dropped earlier. The block that
was dropped first is therefore always a leaf, and evicting it leaves no orphans. With a sliding window neither holds:
tables drop their first blocks early. Evicting a block then takes all nodes below it out of the index.
"""

from collections.abc import Iterator, Sequence

Tokens = tuple[int, ...]


class PrefixNode:
    """A full block in its context: its positions attended to the tokens on the path from the root."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: "PrefixNode | None", key: Tokens, block: int) -> None:
        self.parent = parent  # None for a root, which has no block
        self.key = key
        self.block = block
        self.children: dict[Tokens, PrefixNode] = {}


class PrefixIndex:
    """Indexes blocks of `block_size` tokens. Only the first of several blocks with the same text is indexed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[int, PrefixNode] = {}  # by block
        self._roots: dict[str, PrefixNode] = {}  # by salt; only those with children
        self._salts: dict[PrefixNode, str] = {}  # root → its salt

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> list[PrefixNode]:
        """Return the nodes of the longest indexed prefix of `tokens`: full blocks, at most `limit` of them."""
        path: list[PrefixNode] = []
        node = self._roots.get(salt)
        while node is not None and len(path) < limit:
            start = len(path) * self.block_size
            node = node.children.get(tuple(tokens[start : start + self.block_size]))
            if node is not None:
                path.append(node)
        return path

    def insert(self, parent: PrefixNode | None, salt: str, key: Tokens, block: int) -> PrefixNode:
        """Return the node of these tokens under `parent` (None: the salt's root).

        This is a new node for `block`, or the existing node, which has another block.
        """
        if parent is None:
            parent = self._root(salt)
        node = parent.children.get(key)
        if node is None:
            node = self.nodes[block] = parent.children[key] = PrefixNode(parent, key, block)
        return node

    def remove(self, block: int) -> list[int]:
        """Remove a block and all blocks below it. Returns them, children before parents. Costs O(1) per block."""
        top = self.nodes[block]
        removed = [node.block for node in _below(top)]
        for removed_block in removed:
            del self.nodes[removed_block]
        parent = top.parent
        assert parent is not None, f"block {block} belongs to a root, and roots have no block"
        del parent.children[top.key]
        if not parent.children and parent in self._salts:
            del self._roots[self._salts.pop(parent)]
        return removed

    def _root(self, salt: str) -> PrefixNode:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PrefixNode(None, (), -1)
            self._salts[root] = salt
        return root

    def audit(self, counts: Sequence[int], *, slides: bool = False) -> None:
        """Check the index; raise AssertionError for a defect.

        The tree and its table of blocks must agree, and no root may be empty. No node without a reference may have a
        referenced one below it (`counts`: references by block), unless sequences slide away from their first blocks.
        """
        tree_nodes = [node for root in self._roots.values() for node in _below(root) if node is not root]
        blocks = sorted(node.block for node in tree_nodes)
        assert blocks == sorted(self.nodes), f"blocks in the tree {blocks}, in its table {sorted(self.nodes)}"
        assert all(self.nodes[node.block] is node for node in tree_nodes), "the table has another node than the tree"
        assert all(root.children for root in self._roots.values()), "an empty root"
        assert {root: salt for salt, root in self._roots.items()} == self._salts, "roots and salts differ"
        for node in tree_nodes:
            assert len(node.key) == self.block_size, f"block {node.block} has a key of {len(node.key)} tokens"
            for key, child in node.children.items():
                assert child.parent is node, f"block {child.block} does not know its parent {node.block}"
                assert child.key == key, f"block {child.block} has another key than its own tokens"
                assert slides or counts[node.block] or not counts[child.block], (
                    f"block {child.block} is referenced, but its parent {node.block} is not"
                )


def _below(top: PrefixNode) -> Iterator[PrefixNode]:
    """Return `top` and all nodes below it, children before parents."""
    order, stack = [], [top]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    return reversed(order)
