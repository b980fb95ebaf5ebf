"""The loss of one pack, and how often the draft agrees with the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from draftmill.train import ttt

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(NamedTuple):
    """What one pack gave. Steps are counted from 0 here; positions in reports from 1."""

    loss: Tensor  # float32 scalar, with a gradient: the steps' losses weighted by decay ** k and summed
    step_losses: Tensor  # float32 [K], unweighted
    accepted: Tensor  # bool [K, A]: from this active row the guesses of steps 0 to k are all right
    eligible: Tensor  # bool [K, A]: from this active row steps 0 to k are all supervised


def of_pack(
    model: Any,
    pack: ttt.Pack,
    rows: ttt.Plan,
    *,
    steps: int,
    decay: float,
    kind: str = "forward_kl",
    truth: Tensor | None = None,
) -> Outcome:
    """The loss of a pack: in each step the mean, over supervised starts, of a loss in the draft's vocabulary.

    The target's logits are its head over its last hidden state, which the layer contract takes after the final norm; no
    norm is applied here. Logits and loss are float32 whatever the model computes in.

    Args:
        model: an `Eagle3DraftModel`.
        kind: the loss, of `draftmill.train.objective`.
        truth: int64 [U], ids in the target's vocabulary that a guess must equal to be right. None takes the target's
            most likely token of the draft's vocabulary, which counts a guess as right where the target's own choice is
            a token that the draft cannot say.

    Returns:
        The outcome; a step without any supervised start has loss 0.
    """
    import torch

    from draftmill.train.gradients import HeadLoss

    hidden = torch.cat(list(ttt.unroll(model, pack, rows, steps)))
    starts = torch.tensor(rows.starts, device=hidden.device).clamp(min=1)
    weights = decay ** torch.arange(steps, device=hidden.device) / starts
    step = rows.places // max(len(rows.active), 1)
    states = pack.last_hidden_state[rows.supervised]
    total, losses, guesses, choices = HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, model.lm_head.weight, weights[step], states, model.verifier_lm_head.weight, rows.parts, kind
    )
    with torch.no_grad():
        wanted = choices + model.d2t[choices] if truth is None else truth
        right, supervised = torch.zeros(2, steps * len(rows.active), dtype=torch.bool, device=hidden.device)
        right[rows.places] = guesses + model.d2t[guesses] == wanted[rows.targets]
        supervised[rows.places] = True
    return Outcome(
        loss=total,
        step_losses=torch.zeros(steps, device=hidden.device).index_add_(0, step, losses) / starts,
        accepted=_so_far(right, steps),
        eligible=_so_far(supervised, steps),
    )


def _so_far(each: Tensor, steps: int) -> Tensor:
    """bool [K, A]: whether it holds from step 0 to k."""
    return each.view(steps, -1).long().cumprod(0).bool()


def acceptance_walk(accepted: Tensor, eligible: Tensor, rows: ttt.Plan) -> tuple[int, int]:
    """Greedy speculative decoding along the samples' own text: (tokens gained, verifications).

    From a sample's first supervised row the draft guesses; the right guesses and one token of the target's are kept;
    the next guess starts after them, up to the end of the first answer, after whose last token nobody guesses. Where
    the samples are the target's own greedy answers this is what serving counts.

    Args:
        accepted, eligible: as in `Outcome`.
    """
    right = accepted.sum(0).tolist()
    possible = eligible.sum(0).tolist()
    tokens = verifications = 0
    for document in rows.active_rows.documents:
        places = range(document.queries.start, document.queries.stop)
        row_of = (rows.active[document.queries] - document.rows.start).tolist()
        at = {row: place for row, place in zip(row_of, places, strict=True) if possible[place]}
        row = min(at, default=-1)
        while row in at and row + 1 in at:
            gained = right[at[row]] + 1
            tokens += gained
            verifications += 1
            row += gained
    return tokens, verifications


def target_choice(head: Tensor, pack: ttt.Pack, rows: ttt.Plan) -> Tensor:
    """int64 [U]: the target's most likely token of its whole vocabulary, for each supervised row.

    Args:
        head: the target's output embedding, [V, H].
    """
    import torch

    with torch.no_grad():
        states = pack.last_hidden_state[rows.supervised]
        chunks = torch.split(states, 512)  # bounds the memory that the whole vocabulary's logits take
        return torch.cat([(chunk @ head.T).argmax(-1) for chunk in chunks]) if chunks else rows.supervised
