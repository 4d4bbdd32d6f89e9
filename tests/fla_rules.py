"""A program that computes gated delta rules by the reference functions of fla-core, for
tests/test_fla_oracle.py: its import compiles functions, which stays out of the tests' process.

python fla_rules.py INPUTS OUTPUTS
"""

# pyright: reportMissingImports=false
# fla-core has a folder of its own, which a type checker does not look into.

from __future__ import annotations

import sys

import torch
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.gated_delta_rule.naive import (
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)

EPS = 1e-6
"""That its kernels add to the square of a length, where they normalise q and k."""


def main(source: str, target: str) -> None:
    found = []
    for case in torch.load(source, weights_only=True):
        group = case["v"].shape[1] // case["q"].shape[1]
        q, k = (
            (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()).repeat_interleave(group, 1)
            for x in (case["q"], case["k"])
        )
        # A batch of one sequence.
        beta, decay = case["b"].sigmoid()[None], case["a"]
        decay = naive_gdn_gate(decay, case["A_log"], case["dt_bias"])[None]
        q, k, v, state = q[None], k[None], case["v"][None], case["state"][None]
        rule = {"initial_state": state, "output_final_state": True}
        found.append(
            [
                [
                    part[0]
                    for part in naive_recurrent_gated_delta_rule(q, k, v, beta, decay, **rule)
                ],
                [part[0] for part in naive_chunk_gated_delta_rule(q, k, v, decay, beta, **rule)],
            ]
        )
    torch.save(found, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
