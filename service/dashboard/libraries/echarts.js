// What of ECharts the pages draw with; the rest is left out of the bundle.
import { init, use } from "echarts/core";
import { CustomChart, LineChart, ParallelChart, ScatterChart } from "echarts/charts";
import { BrushComponent, DataZoomInsideComponent, GridComponent, ParallelComponent, TitleComponent } from "echarts/components";
import { CanvasRenderer, SVGRenderer } from "echarts/renderers";

use([CustomChart, LineChart, ParallelChart, ScatterChart]);
use([BrushComponent, DataZoomInsideComponent, GridComponent, ParallelComponent, TitleComponent]);
use([CanvasRenderer, SVGRenderer]);

export { init };
