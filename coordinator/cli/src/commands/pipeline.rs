//! `compass pipeline`: checks and draws files; needs a coordinator only for its catalogue.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::pipeline::Pipeline as Graph;
use compass_shared::spec::documents::{parse_catalogue, parse_pipeline, parse_query};
use serde_json::json;

use super::read_text;
use crate::arguments::{Global, Pipeline};
use crate::http::Api;
use crate::output::print_text;

pub(crate) fn run(global: &Global, command: &Pipeline) -> anyhow::Result<ExitCode> {
    let (file, catalogue) = match command {
        Pipeline::Validate { file, catalogue }
        | Pipeline::Graph {
            file, catalogue, ..
        } => (file, catalogue),
    };
    let catalogue: Catalogue = match catalogue {
        Some(path) => parse_catalogue(&path.display().to_string(), &read_text(path)?)?,
        None => Api::new(global)?.get("/v1/catalogue")?,
    };
    let graph = read(file, &catalogue)?;
    let text = match command {
        Pipeline::Validate { .. } => {
            let combinations: usize = graph
                .operators
                .iter()
                .flat_map(|o| &o.knobs)
                .map(|knob| knob.values.len())
                .product();
            format!(
                "{}: pipeline {} is valid: {} operators, {combinations} configurations\n",
                file.display(),
                graph.name,
                graph.operators.len()
            )
        }
        Pipeline::Graph { dot: true, .. } => dot(&graph),
        Pipeline::Graph { .. } => draw(&graph),
    };
    print_text(
        global,
        &json!({ "pipeline": graph }),
        graph.name.as_str(),
        &text,
    )?;
    Ok(ExitCode::SUCCESS)
}

/// A pipeline file, or a query file with inline operators.
fn read(file: &Path, catalogue: &Catalogue) -> anyhow::Result<Graph> {
    let text = read_text(file)?;
    let source = file.display().to_string();
    let is_query = text.lines().any(|line| line.trim_end() == "kind: Query");
    if is_query {
        return Ok(parse_query(&source, &text, &BTreeMap::new(), catalogue)?.pipeline);
    }
    Ok(parse_pipeline(&source, &text, catalogue)?)
}

fn draw(graph: &Graph) -> String {
    let mut text = String::new();
    for operator in &graph.operators {
        let inputs: Vec<_> = operator.inputs.iter().map(|input| input.as_str()).collect();
        let from = if inputs.is_empty() {
            "source".to_owned()
        } else {
            inputs.join(" + ")
        };
        let _ = writeln!(text, "{from} -> {} ({})", operator.id, operator.kind);
        for knob in &operator.knobs {
            let values: Vec<_> = knob.values.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "    {} = {}", knob.name, values.join(" | "));
        }
    }
    text
}

fn dot(graph: &Graph) -> String {
    let mut text = format!("digraph \"{}\" {{\n  rankdir=LR;\n", graph.name);
    for operator in &graph.operators {
        let _ = writeln!(text, "  \"{}\" [shape=box];", operator.id);
        for input in &operator.inputs {
            let _ = writeln!(text, "  \"{input}\" -> \"{}\";", operator.id);
        }
    }
    text.push_str("}\n");
    text
}
