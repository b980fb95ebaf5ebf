"""The loss of one pack, and how often the draft agrees with the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftmill.train import objective, ttt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pack gave. Steps are counted from 0 here; positions in reports from 1."""

    loss: Tensor  # float32 scalar, with a gradient: the steps' losses weighted by decay ** k and summed
    step_losses: list[Tensor]  # per step, float32 scalar, unweighted
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

    with torch.no_grad():
        logits = model.verifier_lm_head(pack.last_hidden_state[rows.supervised])
        best = logits.argmax(-1)
        wanted = best + model.d2t[best] if truth is None else truth
    of_step = objective.summed(kind, compiled=logits.is_cuda)
    total = torch.zeros((), device=logits.device)
    step_losses: list[Tensor] = []
    accepted = torch.zeros(steps, len(rows.active), dtype=torch.bool, device=logits.device)
    eligible = torch.zeros_like(accepted)
    for k, hidden in enumerate(ttt.unroll(model, pack, rows, steps)):
        starts, targets = rows.starts[k], rows.targets[k]
        draft = model.lm_head(hidden[starts])
        loss = of_step(draft, logits, targets) / max(len(starts), 1)
        total = total + decay**k * loss
        step_losses.append(loss.detach())
        with torch.no_grad():
            guess = draft.argmax(-1)
            right = guess + model.d2t[guess] == wanted[targets]
            accepted[k, starts] = right if k == 0 else right & accepted[k - 1, starts]
            eligible[k, starts] = True if k == 0 else eligible[k - 1, starts]
    return Outcome(loss=total, step_losses=step_losses, accepted=accepted & eligible, eligible=eligible)


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
