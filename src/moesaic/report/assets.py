"""The page's style sheet."""

from __future__ import annotations

from moesaic.report.style import FONT

CSS = (
    f"body{{font-family:{FONT}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:#f4f5f7;color:#1f2937;font-size:15px;line-height:1.5}
main{max-width:1360px;margin:0 auto;padding:32px 24px 40px}
header{margin-bottom:24px}
.brand{margin:0 0 4px;font-size:13px;letter-spacing:.06em;text-transform:uppercase;color:#6b7280;font-weight:600}
h1{margin:0 0 10px;font-size:30px;line-height:1.25;font-weight:650;overflow-wrap:anywhere}
.run{display:inline-block;max-width:100%}
.versus{color:#9aa1ac;font-weight:400;font-size:22px;margin:0 6px}
.lead{margin:0 0 4px;font-size:18px;overflow-wrap:anywhere}
.more{margin:0;max-width:125ch;color:#4b5563;overflow-wrap:anywhere}
h2{margin:36px 0 12px;font-size:20px;font-weight:650;overflow-wrap:anywhere}
h3{margin:0;font-size:15px;font-weight:600}
.dot{display:inline-block;width:.62em;height:.62em;border-radius:50%;margin-right:.42em;flex:none}
.cards{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:14px}
.card,.chart,details,.numbers{background:#fff;border:1px solid #e3e6eb;border-radius:10px}
.card{padding:14px 16px;display:flex;flex-direction:column}
.card h3{font-size:13px;color:#6b7280}
.card .value{display:flex;align-items:center;font-size:22px;line-height:1.45;font-weight:600;font-variant-numeric:tabular-nums}
.card .value .dot{width:10px;height:10px;margin-right:9px}
.card p{margin:auto 0 0;padding-top:4px;font-size:12.5px;color:#6b7280}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px;margin-bottom:14px}
.grid:not(.quarter)>.chart:last-child:nth-child(odd){grid-column:1/-1}
.grid.quarter{grid-template-columns:repeat(4,minmax(0,1fr))}
.chart{margin:0;padding:14px 12px 6px;min-width:0}
.chart figcaption{padding:0 4px 6px}
.chart figcaption p{margin:1px 0 0;font-size:13px;color:#6b7280}
.quarter .chart figcaption p{font-size:12.5px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 12px;font-size:13.5px;color:#374151}
.legend span{display:inline-flex;align-items:center}
.key{display:inline-block;width:20px;height:3px;border-radius:2px;margin-right:7px}
.key.thick{height:4px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;text-align:left;border-top:1px solid #edeff2;font-weight:400;vertical-align:top;overflow-wrap:anywhere}
thead th{border-top:0;font-weight:600;color:#4b5563}
.numbers{border-collapse:separate;border-spacing:0}
.numbers td,.numbers thead th:not(:first-child){text-align:right}
details{margin-bottom:12px;overflow:hidden}
details tbody th{color:#4b5563;width:32%;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px}
summary{cursor:pointer;padding:12px 16px;font-weight:600}
footer{margin-top:32px;font-size:13px;color:#6b7280}
@media (max-width:1080px){.cards,.grid.quarter{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media (max-width:760px){.grid,.grid.quarter{grid-template-columns:minmax(0,1fr)}main{padding:20px 14px}h1{font-size:24px}}
@media print{body{background:#fff}.chart,.card{break-inside:avoid}}
"""
)
"""Inline style: cards and charts on a light ground, one column on a narrow screen."""
