import pytest

from draftmill.errors import LayerError
from draftmill.layers import SERVED_LAYERS, LayerContract, default_ids


@pytest.mark.parametrize(
    ("num_layers", "ids"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (61, (2, 30, 58)), (8, (2, 4, 5))]
)
def test_default_ids_are_those_of_vllms_models(num_layers: int, ids: tuple[int, ...]) -> None:
    assert default_ids(num_layers) == ids
    assert len(ids) == SERVED_LAYERS


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3, 4, 5, 6])
def test_a_shallow_target_has_no_default(num_layers: int) -> None:
    with pytest.raises(LayerError) as caught:
        LayerContract.of(None, num_layers)
    assert "layers =" in caught.value.next_step


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "no layer id"),
        ([2, 2, 5], "repeated: [2]"),
        ([0, 2, 5], "out of range: [0]"),
        ([-1, 2, 5], "out of range: [-1]"),
        ([2, 5, 30], "out of range: [30]"),
        ([2, 31, 40], "out of range: [31, 40]"),
    ],
)
def test_bad_ids_are_named(ids: list[int], words: str) -> None:
    with pytest.raises(LayerError, match=words.replace("[", r"\[").replace("]", r"\]")):
        LayerContract.of(ids, 30)


def test_the_order_asked_for_is_kept_and_survives_json() -> None:
    contract = LayerContract.of([27, 2, 15], 30)
    assert contract.ids == (27, 2, 15)
    assert LayerContract.model_validate_json(contract.model_dump_json()) == contract
