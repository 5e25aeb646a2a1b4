"""The colours of every picture: of matplotlib figures, of notebooks and of the report."""

from __future__ import annotations

# Blue and vermillion are from the palette of Okabe and Ito, which colour-blind readers can distinguish. The names are
# those of the CSS variables of the report, which has a dark mode; `band` is blue with an opacity of 20 %.
LIGHT = {"blue": "#0072b2", "vermillion": "#d55e00", "grey": "#8a8f94", "band": "#0072b233"}
DARK = {"blue": "#56b4e9", "vermillion": "#ff8c42", "grey": "#8d959d", "band": "#56b4e93d"}


def style_sheet() -> str:
    """Return CSS rules that define the variables of all colours, for light and for dark screens."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in mode.items()) for mode in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
