// What of ECharts the pages draw with; the rest is left out of the bundle.
import { init, use } from "echarts/core";
import { CustomChart, LineChart, ScatterChart } from "echarts/charts";
import { BrushComponent, GridComponent, TitleComponent } from "echarts/components";
import { CanvasRenderer, SVGRenderer } from "echarts/renderers";

use([CustomChart, LineChart, ScatterChart]);
use([BrushComponent, GridComponent, TitleComponent]);
use([CanvasRenderer, SVGRenderer]);

export { init };
