// What of ECharts the pages draw with; the rest is left out of the bundle.
import { init, setPlatformAPI, use } from "echarts/core";
import { CustomChart, LineChart, ScatterChart } from "echarts/charts";
import { BrushComponent, GridComponent, TitleComponent } from "echarts/components";
import { CanvasRenderer, SVGRenderer } from "echarts/renderers";

use([CustomChart, LineChart, ScatterChart]);
use([BrushComponent, GridComponent, TitleComponent]);
use([CanvasRenderer, SVGRenderer]);

// ZRender measures a Chinese character in every font, whose width it takes for the height of a line, and in fonts of
// longer texts each control character. Browsers look through all fonts of a machine for one that has it, for as long as
// a small matrix takes: the first is as wide as its font is large, the others are not to be seen.
const WIDE = "国";
const UNSEEN = /^[\0-\x1f\x7f]$/;
let pen = null;
let set = null;
setPlatformAPI({
  measureText(text, font) {
    if (text === WIDE) return { width: Number.parseFloat(/([\d.]+)px/.exec(font)?.[1] ?? "12") };
    if (UNSEEN.test(text)) return { width: 0 };
    pen ??= document.createElement("canvas").getContext("2d");
    if (set !== font) set = pen.font = font;
    return pen.measureText(text);
  },
});

export { init };
