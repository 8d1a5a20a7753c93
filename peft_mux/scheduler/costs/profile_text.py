"""A profile as a table for the terminal."""

from __future__ import annotations

from peft_mux.scheduler.costs.profile import Profile

_TOKENS = (64, 256, 1024, 4096)


def profile_text(profile: Profile) -> str:
    """Return the main times of a profile, forward and backward together.

    Args:
        profile: the profile to be shown, measured or analytic.
    """
    lines = [
        f"profile ({profile.source})  {profile.device}, {profile.dtype}, {profile.model}",
        f"  {'tokens':>8}  {'a layer':>10}  {'one sequence':>13}  {'head, loss':>10}",
    ]
    for tokens in _TOKENS:
        times = profile.layer_s(tokens), profile.attention_s(tokens), profile.head_s(tokens)
        layer, attention, head = (f"{1e3 * float(seconds):.3f} ms" for seconds in times)
        lines.append(f"  {tokens:>8,}  {layer:>10}  {attention:>13}  {head:>10}")
    lines.append(
        f"  a pass costs {1e3 * profile.pass_overhead_s:.2f} ms whatever its size, of which the forward takes"
        f" {profile.forward_fraction:.0%}"
    )
    if profile.overlap is not None:
        known = profile.overlap
        lines.append(
            f"  passes in turns: a turn costs {1e6 * known.turn_s:,.0f} us, computing is {known.slowdown:.0%} slower"
            f" beside a sum; one after another, a sum is waited for {known.skew:.0%} of the computing before it longer;"
            f" the host takes {1e6 * known.host_s:,.0f} us more for what lies between two sums"
        )
    if profile.source == "measured":
        reach = {name: f"{last:,.0f}" for name, last in profile.reach.items()}
        lines.append(
            f"  measured up to {reach['layer']} tokens of a layer, {reach['attention']} of one sequence, "
            f"{reach['adapter']} of an adapter, {reach['head']} targets; larger sizes are continued from there"
        )
    return "\n".join(lines)
