/* In the page. Nothing is waited for by the clock: `until` looks again whenever the kernel has said something, the
page has changed or a picture was loaded. The kernel has done what was asked when each message sent to it was followed
by "idle"; a picture's `src` holds its PNG, so the page has followed when it shows what the notebook's model holds. */
// Messages between page and kernel can be delayed, each way, by a time that is 0 at first.
window.WebSocket = class extends WebSocket {
    send(data) {
        if (dlscale.delay) setTimeout(() => super.send(data), dlscale.delay);
        else super.send(data);
    }
    set onmessage(receive) {
        super.onmessage = event => dlscale.delay ? setTimeout(() => receive(event), dlscale.delay) : receive(event);
    }
};
window.dlscale = {
    delay: 0,
    asked: [],  // what explorers asked to show, and what came
    came: [],
    notebook: () => jupyterapp.shell.currentWidget,
    kernel: () => dlscale.notebook().sessionContext.session.kernel,
    events: new EventTarget(),
    happened: () => dlscale.events.dispatchEvent(new Event('happened')),
    until: (condition, what, minutes) => new Promise((resolve, reject) => {
        const end = (settle, value) => {
            clearTimeout(timer);
            dlscale.events.removeEventListener('happened', look);
            settle(value);
        };
        const look = () => {
            if (dlscale.died) end(reject, new Error('the kernel died'));
            else if (condition()) end(resolve);
        };
        const timer = setTimeout(() => end(reject, new Error(`waited ${minutes} minutes ${what()}`)), 60000 * minutes);
        dlscale.events.addEventListener('happened', look);
        look();
    }),
    watch: async () => {
        await dlscale.notebook().sessionContext.ready;
        const kernel = dlscale.kernel(), idle = msg => msg.content.execution_state === 'idle';
        await kernel.info;
        dlscale.unanswered = new Set();
        kernel.anyMessage.connect((_, {msg, direction}) => {
            if (direction === 'send' && msg.channel === 'shell') dlscale.unanswered.add(msg.header.msg_id);
            const at = msg.content.data?.content?.at;
            if (at) dlscale[direction === 'send' ? 'asked' : 'came'].push(JSON.stringify(at));
        });
        kernel.iopubMessage.connect((_, msg) => {
            if (msg.header.msg_type === 'status' && idle(msg)) dlscale.unanswered.delete(msg.parent_header.msg_id);
            dlscale.happened();
        });
        kernel.statusChanged.connect((_, status) => {
            dlscale.died = ['dead', 'autorestarting'].includes(status);
            dlscale.happened();
        });
        const watched = ['src', 'data-waits', 'hidden'];
        const page = {subtree: true, childList: true, attributes: true, attributeFilter: watched};
        new MutationObserver(dlscale.happened).observe(dlscale.notebook().node, page);
        dlscale.notebook().node.addEventListener('load', dlscale.happened, {capture: true});
    },
    runAll: async minutes => {
        let ran = false;
        jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { ran = true; dlscale.happened(); });
        await dlscale.until(() => ran, () => 'for all cells to run', minutes);
        await dlscale.settled(minutes);
    },
    outputs: () => [...dlscale.notebook().content.model.cells].flatMap(cell => cell.outputs?.toJSON() ?? []),
    images: node => [...node.querySelectorAll('.jp-RenderedImage img, .dlscale-explorer img')],
    explorers: () => [...dlscale.notebook().node.querySelectorAll('.dlscale-explorer')],
    shown: () => {
        const pictures = dlscale.outputs().filter(output => output.data?.['image/png']);
        const images = dlscale.images(dlscale.notebook().node).filter(image => !image.closest('.jupyter-widgets'));
        // an explorer's picture comes with its sentence; where outputs live apart, it is a widget
        const text = output => output.data?.['text/plain'] ?? '';
        const apart = dlscale.outputs().filter(output => /dlscale.page.widgets.Page/.test(text(output))).length;
        const explorers = pictures.filter(text).length + apart;
        return images.length === pictures.length + apart && images.every(image => image.complete)
            && dlscale.explorers().length === explorers
            && dlscale.explorers().every(explorer => explorer.getAttribute('data-waits') === 'false');
    },
    settled: async minutes => {
        const done = () => dlscale.unanswered.size === 0 && dlscale.shown();
        const lacking = () => `for ${dlscale.unanswered.size} answers of the kernel, or for a picture of `
            + dlscale.explorers().map(explorer => explorer.innerText.slice(0, 300)).join('; ');
        do {
            await dlscale.until(done, lacking, minutes);
            // captions are drawn, and a control that waited for the kernel has spoken
            for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
        } while (!done());
    },
    errors: () => {
        const bad = output => output.output_type === 'error' || output.name === 'stderr';
        const text = output => output.text ?? `${output.ename}: ${output.evalue}`;
        const alerts = [...dlscale.notebook().node.querySelectorAll('[role=alert]:not([hidden])')];
        const lost = dlscale.notebook().node.textContent.match(/Error displaying widget.{0,200}/g) ?? [];
        return [...dlscale.outputs().filter(bad).map(text), ...alerts.map(alert => alert.innerText), ...lost];
    },
    pictures: control => Promise.all(dlscale.images(control.closest('.jp-Cell')).map(async image =>
        Array.from(new Uint8Array(await (await fetch(image.src)).arrayBuffer())).join())),
};
