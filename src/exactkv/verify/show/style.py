"""How the HTML report looks, and the little it does when touched. Both are inline: the file stands alone."""

from __future__ import annotations

LIGHT = (
    "#e9eff5", "#cfe0ef", "#a5c8e4", "#6fa8d6", "#ffe08a", "#fdc04f", "#f99b35", "#f0712c", "#dc4426", "#b71f2b",
    "#7d0a2e", "#000000",
)  # fmt: skip
DARK = (
    "#22303d", "#1f4664", "#27618f", "#3a82bd", "#5f4a10", "#85600d", "#b07612", "#dd8a1f", "#f5a04a", "#ffbd85",
    "#ffe0cc", "#ffffff",
)  # fmt: skip
"""Blue is within the tolerance, yellow to red beyond it: told apart with every kind of colour vision. What is large
stands out from the background: dark on light, light on dark."""


def _variables(colors: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{color};" for i, color in enumerate(colors))


CSS = f"""
:root {{ color-scheme: light dark; --page:#ffffff; --ink:#1b1f24; --soft:#59636e; --line:#d5dbe1; --panel:#f6f8fa;
  --good:#1a7f37; --bad:#c11f2b; --unsure:#8a5a00; --rule:#1b1f24; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page:#0f141a; --ink:#e3e8ee; --soft:#9aa6b2; --line:#303a45;
  --panel:#182028; --good:#56d364; --bad:#ff7b72; --unsure:#e3b341; --rule:#e3e8ee; {_variables(DARK)} }} }}
""" + (
    """
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width:1240px; margin:0 auto; padding:20px 20px 60px; }
h1 { font-size:1.35rem; margin:0 0 4px; overflow-wrap:anywhere; }
h2 { font-size:1.15rem; margin:36px 0 10px; } h3 { font-size:1.05rem; margin:0 0 10px; }
.scroll + h3 { margin-top:20px; } h4 { font-size:.95rem; margin:16px 0 6px; }
.verdict { font-weight:600; padding:10px 14px; border-left:5px solid; background:var(--panel); margin:14px 0;
  overflow-wrap:anywhere; }
.exact { color:var(--good); } .violation { color:var(--bad); } .undecided { color:var(--unsure); }
.not-supported { color:var(--soft); }
dl { display:grid; grid-template-columns:max-content minmax(0,1fr); gap:3px 18px; margin:10px 0; }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; }
.scroll { overflow-x:auto; border:1px solid var(--line); border-radius:6px; }
table { border-collapse:collapse; width:100%; }
th, td { text-align:left; padding:5px 10px; vertical-align:top; font-variant-numeric:tabular-nums; }
thead th { font-weight:600; color:var(--soft); border-bottom:1px solid var(--line); white-space:nowrap;
  background:var(--panel); }
tbody th { font-weight:500; overflow-wrap:anywhere; min-width:8em; max-width:26em; }
.outcomes tbody tr + tr > * { border-top:1px solid var(--line); }
.num { text-align:right; white-space:nowrap; } .status { white-space:nowrap; font-weight:600; }
.reason { min-width:16em; max-width:40em; overflow-wrap:anywhere; }
.map { width:auto; } .map th, .map td { padding:1px 10px; vertical-align:middle; }
.map th { position:sticky; left:0; background:var(--page); z-index:1; font-size:13px; min-width:0; width:1%;
  max-width:26em; white-space:nowrap; overflow:hidden; text-overflow:ellipsis; border-right:1px solid var(--line); }
.map thead th { background:var(--panel); } .map thead th + th { position:static; border-right:0; max-width:none; }
.map svg { display:block; } .map text { font-size:11px; fill:var(--soft); } .tick { stroke:var(--line); }
.rule { stroke:var(--rule); stroke-width:1.5; fill:none; } .rule.sliding { stroke-dasharray:3 2; }
.legend { list-style:none; display:flex; flex-wrap:wrap; gap:4px 16px; padding:0; margin:6px 0 10px; font-size:12px;
  color:var(--soft); }
.legend li { display:flex; gap:6px; align-items:center; } .legend span { overflow-wrap:anywhere; }
.steps { gap:4px 2px; } .steps li { flex-direction:column; gap:1px; min-width:54px; align-items:flex-start; }
.steps svg { width:100%; } .steps rect { width:100%; } .steps span { padding-right:6px; white-space:nowrap; }
.told { display:block; min-height:1.5em; font-size:13px; color:var(--soft); }
.finding { border:1px solid var(--line); border-left:5px solid var(--bad); border-radius:6px; padding:14px 16px;
  margin:14px 0; }
.finding ol:not(.layers) { margin:4px 0; padding-left:2em; overflow-wrap:anywhere; }
code, pre { font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
pre { background:var(--panel); border:1px solid var(--line); border-radius:6px; padding:12px; margin:6px 0;
  overflow:auto; max-height:30em; }
.layers { list-style:none; display:flex; flex-wrap:wrap; gap:6px; padding:0; margin:6px 0; font-size:12px; }
.layers li { border:1px solid var(--line); border-radius:4px; padding:4px 6px 3px; width:104px; display:flex;
  flex-direction:column; line-height:1.35; }
.layers .first { outline:2px solid var(--bad); } .layers em { color:var(--bad); font-style:normal; font-weight:600; }
.layers span { color:var(--soft); }
button, select, input { font:inherit; font-size:13px; color:inherit; background:var(--panel);
  border:1px solid var(--line); border-radius:5px; padding:4px 10px; } button { cursor:pointer; }
.tools { display:flex; flex-wrap:wrap; gap:8px; margin:0 0 10px; }
summary { cursor:pointer; } details { margin:8px 0; }
.unseen { position:absolute; width:1px; height:1px; overflow:hidden; clip-path:inset(50%); white-space:nowrap; }
@media (max-width:640px) { main { padding:14px 12px 40px; } dl { grid-template-columns:1fr; gap:0; }
  dd { margin-bottom:6px; } .map th { max-width:42vw; } .steps li { min-width:44px; font-size:11px; } }
"""
    + "".join(f".c{i} {{ fill:var(--c{i}); }}" for i in range(len(LIGHT)))
    + "\n.c11 { stroke:var(--page); stroke-width:3; stroke-dasharray:2 3; }"
    "\n@media print { .tools, button { display:none; } .scroll { overflow:visible; } }\n"
)

SCRIPT = """
'use strict';
document.querySelectorAll('pre[data-copy]').forEach(pre => {
  const button = document.createElement('button');
  button.type = 'button'; button.textContent = 'Copy';
  button.addEventListener('click', async () => {
    try { await navigator.clipboard.writeText(pre.textContent); button.textContent = 'Copied'; }
    catch { getSelection().selectAllChildren(pre); button.textContent = 'Selected: copy with the keyboard'; }
    setTimeout(() => { button.textContent = 'Copy'; }, 2500);
  });
  pre.before(button);
});
document.querySelectorAll('table.map').forEach(map => {
  const told = map.closest('section').querySelector('.told');
  const tell = event => {
    const title = event.target.closest('rect')?.querySelector('title');
    const row = event.target.closest('tr')?.querySelector('th');
    if (title && row) told.textContent = row.textContent.trim() + ', ' + title.textContent;
  };
  map.addEventListener('pointerover', tell); map.addEventListener('click', tell);
});
document.querySelectorAll('table.outcomes').forEach(table => {
  const rows = [...table.tBodies[0].rows], tools = document.createElement('div');
  const select = document.createElement('select'), input = document.createElement('input');
  const statuses = new Set(rows.map(row => row.dataset.status));
  select.append(new Option('every status', 'all'));
  statuses.forEach(status => select.append(new Option(status, status)));
  select.setAttribute('aria-label', 'Status'); input.setAttribute('aria-label', 'Filter by words');
  input.type = 'search'; input.placeholder = 'filter by words';
  const show = () => rows.forEach(row => {
    row.hidden = (select.value !== 'all' && row.dataset.status !== select.value)
      || !row.textContent.toLowerCase().includes(input.value.toLowerCase());
  });
  select.addEventListener('change', show); input.addEventListener('input', show);
  tools.className = 'tools'; tools.append(select, input); table.parentElement.before(tools);
});
"""
