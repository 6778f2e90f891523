"""The page around a report. ``@@NAME@@`` stands for what is put in."""

from __future__ import annotations

__all__ = ['PAGE']

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>@@TITLE@@</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f1f5f9; color: #0f172a; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 24px; }
h1 { margin: 0 0 16px; font-size: 28px; overflow-wrap: anywhere; }
h2 { margin: 32px 0 12px; font-size: 19px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { background: white; border: 1px solid #e2e8f0; border-radius: 8px; padding: 10px 16px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tile span { color: #475569; font-size: 13px; }
.remark { margin: 12px 0 0; padding: 8px 12px; background: #fefce8; border-left: 3px solid #ca8a04; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 16px; }
.card { margin: 0; background: white; border: 1px solid #e2e8f0; border-radius: 8px; padding: 12px; min-width: 0; }
.scroll { overflow-x: auto; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption small { color: #64748b; font-weight: 400; margin-left: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: #475569; font-weight: 600; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid #e2e8f0; vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
pre { background: white; border: 1px solid #e2e8f0; border-radius: 8px; padding: 12px; overflow-x: auto;
  font-size: 13px; }
summary { cursor: pointer; }
footer { margin-top: 32px; color: #475569; font-size: 13px; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<h1>@@TITLE@@</h1>
<div class="tiles">@@SUMMARY@@</div>
@@REMARKS@@
@@SECTIONS@@
<footer>@@FOOT@@</footer>
</main>
<script type="application/json" id="panels">@@PANELS@@</script>
<script>@@PLOTLY@@</script>
<script>
JSON.parse(document.getElementById('panels').textContent).forEach((panel, number) =>
  Plotly.newPlot('panel' + number, panel.data, panel.layout, {
    responsive: true,
    displaylogo: false,
    // Those that need nothing but the page.
    modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'resetScale2d']],
  }));
</script>
</body>
</html>
"""
