"""Whatever is given with ``--set`` makes settings, or is refused in one line that names it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gaupipe.settings import Settings
from gaupipe.settings.load import flatten, load, parse, with_overrides
from gaupipe.system.errors import UserError

NAMES = sorted(flatten(load("digits_expected")))

scalars = st.sampled_from(
    ["", "null", "true", "0", "-1", "1", "7", "1e-3", "1e999", ".nan", "-.inf", "0x10", "1_000"]
) | st.text("abz059.-+_~!&*?|>%@`'\"#: ", max_size=12)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.tuples(st.sampled_from(["lr", "depth", "std", "mean", "x"]), inner).map(
            lambda pair: f"{{{pair[0]}: {pair[1]}}}"
        )
    ),
    max_leaves=4,
)
names = st.sampled_from(NAMES) | st.sampled_from(NAMES).map(lambda name: name.split(".")[0])
keys = names | st.tuples(names, st.sampled_from(["x", "lr", "", "optim"])).map(".".join)
overrides = st.tuples(keys, values).map("=".join) | st.text(max_size=20)


@settings(max_examples=300, deadline=None)
@given(st.lists(overrides, min_size=1, max_size=2))
def test_any_override_makes_settings_or_is_refused_in_one_line(given_overrides):
    made = refusal = None
    try:
        made = load("digits_expected", given_overrides)
    except UserError as error:
        refusal = str(error)
    if made is None:
        assert refusal is not None
        assert refusal.strip()
        assert "\n" not in refusal
        return
    assert isinstance(made, Settings)
    again = parse(with_overrides(made.model_dump(mode="json"), []), "again")
    assert flatten(again) == flatten(made)
