//! Rewrites the SSD-MobileNet person detector from TFLite (half precision, channels last) to ONNX (single precision, channels first).
//!
//! Start at [`to_onnx`]. The weights stay what they are; only the side of the input is another, and what follows from it: the shapes
//! between are left open, the padding stays "same". The outputs are 4 box values and 24 class logits per anchor.
//!
//! Only the operators of this one network are known; anything else is an error that names it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail, ensure};

use super::flatbuffer::Table;
use super::onnx::{Attribute, Graph, Side};

/// Operators, by their numbers in the TFLite schema.
const ADD: i32 = 0;
const CONCATENATION: i32 = 2;
const CONV_2D: i32 = 3;
const DEPTHWISE_CONV_2D: i32 = 4;
const DEQUANTIZE: i32 = 6;
const RESHAPE: i32 = 22;

/// Element types, by their numbers in the TFLite schema.
const FLOAT32: u8 = 0;
const FLOAT16: u8 = 1;

/// Fused activations, by their numbers in the TFLite schema.
const NONE: u8 = 0;
const RELU6: u8 = 3;

/// Names of the limits of ReLU6.
const LIMITS: [&str; 2] = ["zero", "six"];

/// A TFLite graph being rewritten.
struct Conversion<'a> {
    tensors: Vec<Table<'a>>,
    buffers: Vec<Table<'a>>,
    /// Which tensor a widened constant comes from.
    widened: BTreeMap<i32, i32>,
    /// Tensors that are pictures, channels first on our side.
    pictures: BTreeSet<i32>,
    graph: Graph,
}

/// Rewrites the model for pictures of `side × side` pixels.
///
/// # Errors
/// When the file is cut or has an operator that the detector does not have.
pub(super) fn to_onnx(tflite: &[u8], side: i64) -> anyhow::Result<Vec<u8>> {
    let cut = "the model's file is cut short";
    let model = Table::root(tflite).context(cut)?;
    let graphs = model.tables(2).context(cut)?;
    let graph = graphs.first().context("the model has no graph")?;
    let codes = model.tables(1).context(cut)?;
    let mut conversion = Conversion {
        tensors: graph.tables(0).context(cut)?,
        buffers: model.tables(4).context(cut)?,
        widened: BTreeMap::new(),
        pictures: BTreeSet::new(),
        graph: Graph::default(),
    };
    for (name, limit) in LIMITS.into_iter().zip([0.0, 6.0]) {
        conversion.graph.floats(name, &[], &[limit]);
    }
    let (inputs, outputs) = (
        graph.numbers(1).context(cut)?,
        graph.numbers(2).context(cut)?,
    );
    let ([input], [boxes, classes]) = (&inputs[..], &outputs[..]) else {
        bail!("the model has not one input and two outputs");
    };
    conversion.pictures.insert(*input);
    for operator in graph.tables(3).context(cut)? {
        let code = usize::try_from(operator.number(0, 0)).ok();
        let code = code.and_then(|index| codes.get(index)).context(cut)?;
        // Old files have the number in the first field only, new ones in both.
        let code = i32::from(code.byte(0)).max(code.number(3, 0));
        conversion.operator(code, &operator)?;
    }
    Ok(conversion.graph.finish(
        "ssd-mobilenet-v2",
        (&named(*input), &[1, 3, side, side].map(Side::Fixed)),
        &[
            (&named(*boxes), &anchors(4)),
            (&named(*classes), &anchors(24)),
        ],
    ))
}

/// The shape of an output with so many values per anchor.
fn anchors(columns: i64) -> [Side; 3] {
    [Side::Fixed(1), Side::Any("anchor"), Side::Fixed(columns)]
}

fn named(tensor: i32) -> String {
    format!("t{tensor}")
}

impl<'a> Conversion<'a> {
    fn operator(&mut self, code: i32, operator: &Table<'a>) -> anyhow::Result<()> {
        let cut = "an operator is cut short";
        let inputs = operator.numbers(1).context(cut)?;
        let outputs = operator.numbers(2).context(cut)?;
        let [output] = outputs[..] else {
            bail!("operator {code} has not one output");
        };
        let first = *inputs.first().context(cut)?;
        match code {
            DEQUANTIZE => {
                self.widened.insert(output, first);
            }
            CONV_2D | DEPTHWISE_CONV_2D => {
                let options = operator.table(4).context(cut)?;
                let [picture, weights, bias] = inputs[..] else {
                    bail!("a convolution without bias");
                };
                self.convolution(code, &options, picture, (weights, bias), output)?;
            }
            ADD => {
                let options = operator.table(4).context(cut)?;
                ensure!(options.byte(0) == NONE, "an addition with an activation");
                let names: Vec<String> = inputs.iter().copied().map(named).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                self.graph.node("Add", &names, &named(output), &[]);
                self.pictures.insert(output);
            }
            RESHAPE => self.reshape(first, output)?,
            CONCATENATION => {
                let names: Vec<String> = inputs.iter().copied().map(named).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let axis = [("axis", Attribute::Int(1))];
                self.graph.node("Concat", &names, &named(output), &axis);
            }
            other => bail!("the model has an operator of number {other}, which is not known"),
        }
        Ok(())
    }

    fn convolution(
        &mut self,
        code: i32,
        options: &Table<'a>,
        picture: i32,
        (weights, bias): (i32, i32),
        output: i32,
    ) -> anyhow::Result<()> {
        ensure!(options.byte(0) == 0, "a convolution without padding");
        // The depthwise one has its depth multiplier before the activation.
        let activation = options.byte(if code == CONV_2D { 3 } else { 4 });
        let (shape, values) = self.constant(weights)?;
        let [first, rows, columns, last] = shape[..] else {
            bail!("weights of {} dimensions", shape.len());
        };
        // Channels last to channels first.
        let (shape, group) = if code == CONV_2D {
            ([first, last, rows, columns], 1)
        } else {
            ([last, 1, rows, columns], last)
        };
        let turned = turn(&values, first, rows * columns, last);
        let as_ints = |numbers: &[usize]| numbers.iter().map(|n| *n as i64).collect::<Vec<_>>();
        let (weights_name, bias_name) = (named(weights), named(bias));
        self.graph.floats(&weights_name, &as_ints(&shape), &turned);
        let (bias_shape, bias_values) = self.constant(bias)?;
        self.graph
            .floats(&bias_name, &as_ints(&bias_shape), &bias_values);
        let output_name = named(output);
        let plain = format!("{output_name}_plain");
        let target = if activation == NONE {
            &output_name
        } else {
            &plain
        };
        self.graph.node(
            "Conv",
            &[&named(picture), &weights_name, &bias_name],
            target,
            &[
                ("auto_pad", Attribute::Text("SAME_UPPER")),
                ("group", Attribute::Int(group as i64)),
                ("kernel_shape", Attribute::Ints(&as_ints(&[rows, columns]))),
                (
                    "strides",
                    Attribute::Ints(&[
                        i64::from(options.number(2, 1)),
                        i64::from(options.number(1, 1)),
                    ]),
                ),
            ],
        );
        match activation {
            NONE => {}
            RELU6 => {
                let [zero, six] = LIMITS;
                self.graph
                    .node("Clip", &[target, zero, six], &output_name, &[]);
            }
            other => bail!("an activation of number {other}, which is not known"),
        }
        self.pictures.insert(output);
        Ok(())
    }

    /// Every reshaping makes rows of the last side's length out of whatever came.
    fn reshape(&mut self, input: i32, output: i32) -> anyhow::Result<()> {
        let shape = self.tensor(output)?.numbers(0).unwrap_or_default();
        let columns = i64::from(*shape.last().context("a reshaping to nothing")?);
        let mut from = named(input);
        if self.pictures.contains(&input) {
            let turned = format!("{from}_for_{output}");
            let order = [("perm", Attribute::Ints(&[0, 2, 3, 1]))];
            self.graph.node("Transpose", &[&from], &turned, &order);
            from = turned;
        }
        let name = named(output);
        let shape_name = format!("{name}_shape");
        self.graph.integers(&shape_name, &[1, -1, columns]);
        self.graph
            .node("Reshape", &[&from, &shape_name], &name, &[]);
        Ok(())
    }

    fn tensor(&self, index: i32) -> anyhow::Result<Table<'a>> {
        let found = usize::try_from(index)
            .ok()
            .and_then(|index| self.tensors.get(index));
        found
            .copied()
            .with_context(|| format!("there is no tensor {index}"))
    }

    /// Shape and values of a constant.
    fn constant(&self, index: i32) -> anyhow::Result<(Vec<usize>, Vec<f32>)> {
        let tensor = self.tensor(self.widened.get(&index).copied().unwrap_or(index))?;
        let shape: Vec<usize> = tensor
            .numbers(0)
            .unwrap_or_default()
            .into_iter()
            .map(|side| usize::try_from(side).unwrap_or(0))
            .collect();
        let buffer = usize::try_from(tensor.number(2, 0)).ok();
        let buffer = buffer.and_then(|index| self.buffers.get(index));
        let data = buffer
            .and_then(|buffer| buffer.data(0))
            .with_context(|| format!("the values of tensor {index} are missing"))?;
        let values: Vec<f32> = match tensor.byte(1) {
            FLOAT32 => data
                .chunks_exact(4)
                .filter_map(|chunk| chunk.first_chunk().copied())
                .map(f32::from_le_bytes)
                .collect(),
            FLOAT16 => data
                .chunks_exact(2)
                .filter_map(|chunk| chunk.first_chunk().copied())
                .map(|bytes| widen(u16::from_le_bytes(bytes)))
                .collect(),
            other => bail!("tensor {index} is of type {other}, which is not known"),
        };
        ensure!(
            values.len() == shape.iter().product::<usize>() && !values.is_empty(),
            "tensor {index} has {} values in a shape of {shape:?}",
            values.len()
        );
        Ok((shape, values))
    }
}

/// Moves the last of three sides before the middle one.
fn turn(values: &[f32], first: usize, middle: usize, last: usize) -> Vec<f32> {
    let mut turned = Vec::with_capacity(values.len());
    for outer in 0..first {
        for channel in 0..last {
            for place in 0..middle {
                turned.push(values[(outer * middle + place) * last + channel]);
            }
        }
    }
    turned
}

/// Half precision to single, exactly.
pub(super) fn widen(half: u16) -> f32 {
    let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(half >> 10 & 0x1f);
    let fraction = f32::from(half & 0x3ff) / 1024.0;
    let size = match exponent {
        0 => fraction * 2f32.powi(-14),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + fraction) * 2f32.powi(exponent - 15),
    };
    sign * size
}
