"""The trainings of several_models.md and several_optimizers.md as a user has them in one process.

Plain torch: the whole batch, ``loss.backward()``, no microbatches and no name of nxdpp. Each loss is a mean over rows.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.leaky_relu(super().forward(x), 0.2)


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, outputs))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Train on ``loss`` with clipped gradients; return it."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def teacher_and_student() -> list[float]:
    """Losses of a student that follows a teacher, the last one with the average of its weights."""
    teacher, student = network(10), network(10)
    average = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)

    def loss_of(model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
        given = F.log_softmax(logits, -1)
        return F.kl_div(F.log_softmax(model(x), -1), given, reduction="batchmean", log_target=True)

    losses = []
    for _ in range(4):
        x = torch.randn(16, 16)
        with torch.no_grad():
            logits = teacher(x)
        losses.append(step(student, optimizer, loss_of(student, x, logits)))
        for mean, parameter in zip(average.parameters(), student.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.5)
    with torch.no_grad():
        return [*losses, loss_of(average, x, logits).item()]


def actor_and_critic() -> list[float]:
    """Losses of an actor and a critic, in turn."""
    actor, critic = network(4), network(1)
    of_actor = torch.optim.AdamW(actor.parameters(), lr=0.01)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        x = torch.randn(16, 16)
        logits, values = F.log_softmax(actor(x), -1), critic(x).squeeze(1)
        action = logits.detach().exp().multinomial(1)
        returns = (action.squeeze(1) == 0).float()
        advantage = returns - values.detach()
        losses.append(step(actor, of_actor, -(logits.gather(1, action).squeeze(1) * advantage).mean()))
        losses.append(step(critic, of_critic, F.mse_loss(values, returns)))
    return losses


def gan() -> list[float]:
    """Losses of a discriminator and a generator, in turn."""
    made, judged = network(16), network(1)
    of_made = torch.optim.AdamW(made.parameters(), lr=1e-3)
    of_judged = torch.optim.AdamW(judged.parameters(), lr=4e-3)
    losses = []
    for _ in range(3):
        noise, real = torch.randn(16, 16), torch.randn(16, 16) + 1
        loss = F.softplus(-judged(real)).mean() + F.softplus(judged(made(noise).detach())).mean()
        loss.backward()
        of_judged.step()
        losses.append(loss.item())
        judged.zero_grad()
        loss = F.softplus(-judged(made(noise))).mean()
        loss.backward()
        of_made.step()
        losses.append(loss.item())
        made.zero_grad()
        judged.zero_grad()
    return losses


def muon_and_rates() -> list[float]:
    """Losses of a classifier with Muon for matrices and rates by layer, which a second script goes on with."""
    losses: list[float] = []

    def script(saved: list[Any]) -> list[Any]:
        model = network(4)
        matrices = [each for each in model.parameters() if each.ndim == 2]
        vectors = [{"params": [each.bias], "lr": 0.01 * 0.8**number} for number, each in enumerate(model)]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors)]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
        states: list[Any] = [model, *optimizers, *schedulers]
        for each, state in zip(states, saved, strict=False):
            each.load_state_dict(state)
        for number in range(3):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(number))
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            losses.append(loss.item())
            for each in states[1:]:
                each.step()
            model.zero_grad()
        return [copy.deepcopy(each.state_dict()) for each in states]

    script(script([]))
    return losses


SCRIPTS: dict[str, dict[str, Callable[[], list[float]]]] = {
    "several_models": {"student": teacher_and_student, "actor, critic": actor_and_critic},
    "several_optimizers": {"gan": gan, "classifier": muon_and_rates},
}
"""The trainings of each page in order, by the words before their losses."""


def lines(page: str) -> Iterator[str]:
    """What the scripts of ``page`` print, one after the other from one seed."""
    torch.manual_seed(0)
    for name, training in SCRIPTS[page].items():
        yield " ".join([name, *(f"{loss:.4f}" for loss in training())])
