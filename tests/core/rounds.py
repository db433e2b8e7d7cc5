"""One dispatch and its combine on a worker, checked against the oracle at both ends."""

from __future__ import annotations

from typing import Any

import torch

from tests.core import oracle
from tests.core.pool import World

LAYOUTS = {"normal": "compact", "direct": "compact", "low_latency": "masked", "hybrid": "masked"}


class Round:
    """Send, receive, answer, collect: whole by :meth:`run`, or one phase at a time."""

    def __init__(
        self,
        world: World,
        buffer: Any,
        case: oracle.Case,
        mode: str,
        *,
        layout: str | None = None,
        payload: str = "bf16",
        lane: int = 0,
        hook: bool = False,
        ids_dtype: torch.dtype = torch.int64,
        handle: Any = None,
        host_counts: bool = True,
        most_tokens: int | None = None,
        sms: int | None = None,
    ) -> None:
        self.world, self.buffer, self.case, self.mode = world, buffer, case, mode
        self.layout = layout or LAYOUTS[mode]
        self.payload, self.lane, self.split = payload, lane, hook
        self.ids_dtype, self.handle, self.host_counts = ids_dtype, handle, host_counts
        self.most_tokens, self.sms = most_tokens, sms
        self.x: Any = None
        self.got: Any = None
        self.y: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        self._finish: Any = None

    def __str__(self) -> str:
        tokens = [len(x) for x in self.case.x]
        return f"{self.mode} {self.layout} {self.payload} lane {self.lane} hook {self.split} tokens {tokens}"

    def run(self) -> Round:
        """All phases in order. The error of a failed check says which round it was."""
        try:
            self.dispatch()
            self.receive()
            self.combine()
            self.collect()
        except AssertionError as e:
            raise AssertionError(f"{self}: {e}") from e
        return self

    def dispatch(self) -> None:
        case, rank, device = self.case, self.world.rank, self.world.device
        self.x, more = oracle.given(case.x[rank], self.payload)
        x = self.x
        x = tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)
        routing = (case.ids[rank].to(device, self.ids_dtype), case.weights[rank].to(device))
        if self.handle is not None:
            routing, more = (None, None), {**more, "handle": self.handle}
        self.x = x
        self.got = self.buffer.dispatch(
            x,
            *routing,
            mode=self.mode,
            layout=self.layout,
            lane=self.lane,
            return_hook=self.split,
            host_counts=self.host_counts,
            most_tokens=self.most_tokens,
            sms=self.sms,
            **more,
        )

    def receive(self) -> None:
        if self.split:
            self.got.hook()
        limit = self.buffer.config.max_tokens[self.mode] if self.most_tokens is None else self.most_tokens
        oracle.check_dispatch(
            self.case,
            self.world.rank,
            self.got,
            layout=self.layout,
            payload=self.payload,
            max_tokens=limit,
        )

    def combine(self) -> None:
        self.y = oracle.run_experts(self.case, self.world.rank, self.got, layout=self.layout, payload=self.payload)
        answer = self.buffer.combine(self.y, self.got.handle, return_hook=self.split)
        self.out, self._finish = answer if self.split else (answer, None)

    def collect(self) -> None:
        if self._finish is not None:
            self._finish()
        config = self.buffer.config
        assert self.out is not None
        oracle.check_combine(
            self.case,
            self.world.rank,
            self.out,
            layout=self.layout,
            payload=self.payload,
            nodes=config.shape.nodes if self.mode in ("normal", "hybrid") else 1,
            per_expert=self.mode == "low_latency" and bool(config.shape.per_expert),
        )
        self.world.rounds += 1

    def poison(self) -> None:
        """Fill everything this round handed out or took with NaN: nothing of it may show up again."""
        tensors = [*(self.x if isinstance(self.x, tuple) else (self.x,)), self.y, self.out]
        tensors += [self.got.rows, self.got.scales, self.got.topk_weights]
        for t in tensors:
            if t is not None and t.dtype.is_floating_point and t.numel():
                if t.dtype == torch.float8_e4m3fn:
                    t.view(torch.uint8).fill_(0x7F)
                else:
                    t.fill_(float("nan"))
