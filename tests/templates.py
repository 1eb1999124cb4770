"""Chat templates that treat reasoning as published ones do."""

# As Qwen3.5's: what was thought before the user's last turn is left out, and how an old answer is
# opened differs from how a new one is; calls name their arguments one by one.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{- "<|im_start|>system\\n# Tools\\n" + tools | tojson }}
{%- if messages[0].role == "system" %}{{- "\\n\\n" + messages[0].content }}{% endif %}
{{- "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
{{- "<|im_start|>system\\n" + messages[0].content + "<|im_end|>\\n" }}
{%- endif %}
{%- for m in messages %}
    {%- set content = (m.content or "") | trim %}
    {%- if m.role == "user" %}
        {{- "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif m.role == "assistant" %}
        {%- set thought = "" %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif "</think>" in content %}
            {%- set thought = content.split("</think>")[0].rstrip("\\n").split("<think>")[-1] %}
            {%- set thought = thought.lstrip("\\n") %}
            {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
        {%- endif %}
        {%- set thought = thought | trim %}
        {%- if loop.index0 > ns.last %}
            {{- "<|im_start|>assistant\\n<think>\\n" + thought + "\\n</think>\\n\\n" + content }}
        {%- else %}
            {{- "<|im_start|>assistant\\n" + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- ("\\n\\n" if loop.first and content else "") + "<tool_call>\\n<function=" }}
            {{- call.function.name + ">\\n" }}
            {%- for name, value in call.function.arguments | items %}
                {%- set value = value if value is string else value | tojson %}
                {{- "<parameter=" + name + ">\\n" + value + "\\n</parameter>\\n" }}
            {%- endfor %}
            {{- "</function>\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif m.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{% endif %}
        {{- "\\n<tool_response>\\n" + content + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n<think>\\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- "\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}
"""
