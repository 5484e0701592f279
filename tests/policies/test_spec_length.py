from policies.spec_length import Fixed


def test_the_policys_k_unless_the_request_asks_for_its_own() -> None:
    assert Fixed(5).plan([None, 0, 3, 8], [9, 9, 9, 9]) == [5, 0, 3, 8]


def test_never_more_than_a_sequence_can_use() -> None:
    assert Fixed(5).plan([None, 8, 2], [0, 3, 4]) == [0, 3, 2]
