"""The verdict of `match` in plain Python, where the target's draws are on the host already.

Operations of torch on so few numbers take longer: on one core of a Xeon all of verify() took 195 µs for one greedy
sequence with four drafts and 235 for eight, and takes 56 and 88. For trees of 14 nodes it was 560 and 950, and is 104
and 280.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.sampling.acceptance import Verdict
from engine.trees import Parents


def match(
    drawn: Seq[int], finite: Seq[bool], drafts: Seq[list[int]], trees: Mapping[int, Parents], vocab_size: int
) -> Verdict:
    """Accept drafts while they equal what the target itself drew for their position (architecture R6).

    drawn: the target's draws, sequence by sequence: one behind the committed text and one behind each draft. finite:
    whether the draw's score is finite. drafts: each sequence's ids. trees: index of a sequence → the shape of its
    drafts; those of others are chains. The emitted tokens are always the target's own draws: the text cannot depend on
    the drafts, and an illegal id costs its sequence's draft only.

    Example: drawn (7, 3, 9, 4), drafts (7, 3, 5) as a chain: two are accepted, then comes token 9.
    """
    accepted, emitted, non_finite, paths = list[int](), list[list[int]](), list[bool](), dict[int, list[int]]()
    all_finite, first = False not in finite, 0
    for i, tokens in enumerate(drafts):
        end = first + len(tokens) + 1
        own = drawn[first:end]
        nodes = walk(own, tokens, trees.get(i))
        accepted.append(len(nodes))
        emitted.append([*[tokens[node] for node in nodes], own[nodes[-1] + 1 if nodes else 0]])
        non_finite.append(not (all_finite or (finite[first] and all(finite[first + node + 1] for node in nodes))))
        if i in trees:
            paths[i] = list(nodes)
        first = end
    num_illegal = sum([min(tokens) < 0 or max(tokens) >= vocab_size for tokens in drafts if tokens])
    return Verdict(accepted, emitted, non_finite, [()] * len(drafts), num_illegal, list(drafts), paths)


def walk(drawn: Seq[int], drafts: Seq[int], parents: Parents | None) -> Seq[int]:
    """The accepted nodes, from the root's child down. Of equal siblings only the first can be reached.

    drawn: at the root, then at each node. parents: of the nodes; None: a chain.
    """
    if parents is None:
        for node, token in enumerate(drafts):
            if token != drawn[node]:
                return range(node)
        return range(len(drafts))
    row, path = 0, list[int]()
    for node, parent in enumerate(parents):  # a node comes behind its parent and its earlier siblings
        if parent + 1 == row and drafts[node] == drawn[row]:
            row = node + 1
            path.append(node)
    return path
