"""The style sheet of the pages. Colours of series (s0 to s6) can be told apart without seeing red or green."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5a6472;--line:#d9dee5;--page:#fff;--card:#f5f7f9;
--blue:#0072b2;--hot:#d55e00;--mark:#ffe3c2}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebef;--soft:#9aa5b3;--line:#333b45;--page:#14171b;--card:#1d2228;
--blue:#4aa8e0;--hot:#ff8a3d;--mark:#5c3a12}}
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif}h1{font-size:1.5rem;margin:.4rem 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .2rem}h3{font-size:1rem;margin:1.4rem 0 .3rem}
.why{color:var(--soft);margin:.2rem 0 .8rem;max-width:52rem}.lead{max-width:52rem;overflow-wrap:anywhere}
.findings{list-style:none;margin:1rem 0;padding:0;max-width:60rem}
.findings li{border-left:.25rem solid var(--line);padding:.15rem .7rem;margin:.45rem 0;overflow-wrap:anywhere}
.findings li.trouble{border-color:var(--hot)}.findings li.calm{border-color:var(--blue)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1.2rem 0}
.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.cards b,.cards small{display:block;font-weight:400;font-size:.85rem;color:var(--soft)}.cards strong{font-size:1.15rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.2rem;margin-top:.6rem}
.charts.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr))}
figure{margin:0}figcaption{font-weight:600;margin:.3rem 0;font-size:.95rem}.small figcaption{font-size:.85rem}
figure svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--line)}.zero{stroke:var(--hot);stroke-dasharray:4 3}
.legend{margin:.3rem 0;font-size:.85rem;color:var(--soft)}.legend span{margin-right:.9rem;white-space:nowrap}
.legend i{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.3em}
.legend i.cell{border-radius:0}
.s0{fill:#0072b2;background:#0072b2}.s1{fill:#e69f00;background:#e69f00}.s2{fill:#009e73;background:#009e73}
.s3{fill:#cc79a7;background:#cc79a7}.s4{fill:#56b4e9;background:#56b4e9}.s5{fill:#d55e00;background:#d55e00}
.s6{fill:#8c7ae6;background:#8c7ae6}.small small{display:block;color:var(--soft);margin-top:.2rem}
path{shape-rendering:crispEdges}code{white-space:nowrap;font-size:.9em}
.h{fill:var(--blue);background:var(--blue)}.hot{fill:var(--hot);background:var(--hot)}
.none{fill:var(--line);background:var(--line)}.line{fill:none;stroke:var(--blue);stroke-width:1.5}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums}th{font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
.bar{display:inline-block;width:clamp(2.5rem,10vw,6rem);height:.6rem;background:var(--card);text-align:left}
.bar i{display:block;height:100%;background:var(--blue)}
.spark{width:96px;height:22px;vertical-align:middle}.spark polyline{fill:none;stroke:var(--blue);stroke-width:1.5}
.said{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:.8rem}
.said div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.said b,.prompt b{display:block;font-size:.85rem;color:var(--soft);font-weight:400}
.prompt{margin:1.2rem 0 .4rem}
.text{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;font-size:.95rem}
mark{background:var(--mark);color:inherit}
details{margin:1rem 0;border-top:1px solid var(--line);padding-top:.6rem}summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;background:var(--card);padding:.8rem;border-radius:.5rem;font-size:.85rem;white-space:pre-wrap;
overflow-wrap:anywhere}
"""
