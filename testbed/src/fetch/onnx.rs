//! Writes an ONNX model: the few messages of its protobuf schema that a convolutional network needs.
//!
//! Start at [`Graph`]. Field numbers are those of the ONNX schema (IR version 8, operator set 13).

/// A protobuf message being written.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u64, value: i64) {
        self.varint(field << 3);
        self.varint(value.cast_unsigned());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }
}

/// The value of an operator's attribute.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attribute<'a> {
    Int(i64),
    Ints(&'a [i64]),
    Text(&'a str),
}

/// Types of tensors, by their numbers in the schema.
const FLOAT: i64 = 1;
const INT64: i64 = 7;

/// A graph being written.
#[derive(Debug, Default)]
pub(super) struct Graph {
    message: Message,
    nodes: usize,
}

impl Graph {
    /// Adds an operator with one output.
    pub(super) fn node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        output: &str,
        attributes: &[(&str, Attribute<'_>)],
    ) {
        let mut node = Message::default();
        for input in inputs {
            node.bytes(1, input.as_bytes());
        }
        node.bytes(2, output.as_bytes());
        node.bytes(3, format!("{operator}_{}", self.nodes).as_bytes());
        node.bytes(4, operator.as_bytes());
        for (name, value) in attributes {
            let mut attribute = Message::default();
            attribute.bytes(1, name.as_bytes());
            let kind = match value {
                Attribute::Int(number) => {
                    attribute.number(3, *number);
                    2
                }
                Attribute::Ints(numbers) => {
                    for number in *numbers {
                        attribute.number(8, *number);
                    }
                    7
                }
                Attribute::Text(text) => {
                    attribute.bytes(4, text.as_bytes());
                    3
                }
            };
            attribute.number(20, kind);
            node.message(5, &attribute);
        }
        self.message.message(1, &node);
        self.nodes += 1;
    }

    fn constant(&mut self, name: &str, kind: i64, shape: &[i64], raw: &[u8]) {
        let mut tensor = Message::default();
        for side in shape {
            tensor.number(1, *side);
        }
        tensor.number(2, kind);
        tensor.bytes(8, name.as_bytes());
        tensor.bytes(9, raw);
        self.message.message(5, &tensor);
    }

    pub(super) fn floats(&mut self, name: &str, shape: &[i64], values: &[f32]) {
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constant(name, FLOAT, shape, &raw);
    }

    pub(super) fn integers(&mut self, name: &str, values: &[i64]) {
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constant(name, INT64, &[values.len() as i64], &raw);
    }

    /// The whole model with one input and some outputs of floats; a side is a number or a name.
    pub(super) fn finish(
        mut self,
        name: &str,
        input: (&str, &[Side]),
        outputs: &[(&str, &[Side])],
    ) -> Vec<u8> {
        self.message.bytes(2, name.as_bytes());
        self.message.message(11, &value(input));
        for output in outputs {
            self.message.message(12, &value(*output));
        }
        let mut operators = Message::default();
        operators.bytes(1, b"");
        operators.number(2, 13);
        let mut model = Message::default();
        model.number(1, 8);
        model.bytes(2, b"compass");
        model.message(7, &self.message);
        model.message(8, &operators);
        model.0
    }
}

/// One side of a tensor's shape.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Fixed(i64),
    Any(&'static str),
}

fn value((name, sides): (&str, &[Side])) -> Message {
    let mut shape = Message::default();
    for side in sides {
        let mut dimension = Message::default();
        match side {
            Side::Fixed(number) => dimension.number(1, *number),
            Side::Any(text) => dimension.bytes(2, text.as_bytes()),
        }
        shape.message(1, &dimension);
    }
    let mut tensor = Message::default();
    tensor.number(1, FLOAT);
    tensor.message(2, &shape);
    let mut kind = Message::default();
    kind.message(1, &tensor);
    let mut value = Message::default();
    value.bytes(1, name.as_bytes());
    value.message(2, &kind);
    value
}
