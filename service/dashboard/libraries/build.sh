#!/usr/bin/env bash
# Makes static/lib anew from pinned versions: needs node 20 or later and a registry that npm knows. Nobody who works on
# the pages needs it: what it makes is part of the package, and tests/service/dashboard/test_libraries.py checks the sums.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../static/lib
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$work"
echo '{"private": true}' > package.json
# Neither library leaves the version of what it needs open.
npm install --no-audit --no-fund --no-package-lock --silent uplot@1.6.32 echarts@6.1.0 esbuild@0.28.2
cp "$here/echarts.js" .

mkdir -p "$out"
bundle() { npx esbuild "$1" --bundle --minify --format=esm --target=es2022 --legal-comments=none --log-level=error \
    --banner:js="/*! $2 */" --outfile="$out/$3"; }
bundle echarts.js "ECharts 6.1.0, Apache-2.0; ZRender, BSD-3-Clause; tslib, 0BSD: see LICENSES.txt" echarts.js
bundle node_modules/uplot/dist/uPlot.esm.js "uPlot 1.6.32, MIT: see LICENSES.txt" uplot.js
cp node_modules/uplot/dist/uPlot.min.css "$out/uplot.css"
{
    for package in uplot echarts zrender tslib; do
        version=$(node -p "require('./node_modules/$package/package.json').version")
        printf '%s %s\n\n' "$package" "$version"
        for name in LICENSE LICENSE.txt NOTICE licenses/LICENSE-d3; do
            if [ -f "node_modules/$package/$name" ]; then sed 's/[[:space:]]*$//' "node_modules/$package/$name"; echo; fi
        done
        printf -- '----------------------------------------------------------------\n\n'
    done
} > "$out/LICENSES.txt"
cd "$out"
sha256sum LICENSES.txt echarts.js uplot.css uplot.js > SHA256SUMS
